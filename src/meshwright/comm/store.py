"""The rendezvous store of a run; every value in it is signed.

torch's store accepts any client that reaches its port. So every value carries an HMAC of its name and content, keyed
with the run's secret. A value without a valid HMAC is rejected with an error.
"""

import hmac
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from meshwright.spec.errors import UserError

DIGEST, SIGNATURE_BYTES = "sha256", 64


class StrangerError(UserError):
    """A process without the secret writes to the rendezvous store."""


class SignedStore(dist.Store):
    """`store` for ranks that know `secret`. Counters (`add`) are not signed.

    Torch's C++ code may hold this object but does not keep it alive; its creator must.
    """

    def __init__(self, store: dist.Store, secret: bytes, where: str, *, prefix: str = "") -> None:
        """`where`: its address, for messages. `prefix`: added to every name, so that values of an earlier attempt are
        never mistaken for current ones."""
        super().__init__()
        self._store, self._where, self._prefix = store, where, prefix
        self._key = hmac.digest(secret, b"store", DIGEST)  # a separate key: signatures are not valid for objects

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value with its signature."""
        self._store.set(self._prefix + key, self._signed(key, value))  # type: ignore[arg-type]  (bytes are taken too)

    def get(self, key: str) -> bytes:
        """See `dist.Store`. Raises `StrangerError` if the value has no valid signature."""
        return self._verified(key, self._store.get(self._prefix + key))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set `key` if it has no value yet; return its value. Raises `StrangerError` like `get`."""
        assert not expected_value, (
            "expected values are not supported, because stored values are signed; only absence can be expected"
        )
        return self._verified(
            key, self._store.compare_set(self._prefix + key, "", self._signed(key, desired_value).decode())
        )

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which has no signature; returns the sum."""
        return self._store.add(self._prefix + key, value)

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        """Whether all keys have values."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        """Wait until all keys have values."""
        names = [self._prefix + key for key in keys]
        if timeout is None:
            self._store.wait(names)
        else:
            self._store.wait(names, timeout)

    def has_extended_api(self) -> bool:
        """No: values cannot be appended to, nor several keys set at once."""
        return False

    def _signed(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else value
        return self._signature(key, value) + value

    def _verified(self, key: str, signed: bytes) -> bytes:
        signature, value = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, value)):
            raise StrangerError(
                f"{self._prefix + key!r} at the rendezvous {self._where} is not signed with this run's secret: "
                "run_dir is not the same folder on all machines, or another process writes there (docs/security.md)"
            )
        return value

    def _signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._key, (self._prefix + key).encode() + b"\0" + value, DIGEST).hex().encode()
