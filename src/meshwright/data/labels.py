"""Which messages and tokens of a record carry loss, in the words of the systems that records are written for.

| field | of | from | meaning |
|---|---|---|---|
| `weight` | a message or record | OpenAI's fine-tuning API | 0: no loss; 1: as the recipe says |
| `train`, `training` | a message | axolotl (`message_field_training`) | true, false: loss or none, whatever its role |
| `train` | a record | Meshwright | false: the record is left out |
| `loss` | an answer | ms-swift (custom datasets) | true, false: loss or none, whatever the strategy |
| `loss_scale` | an answer | ms-swift | 0: no loss; 1: as the recipe says |
| `loss_weight` | an answer | LLaMA-Factory v1 | 0: no loss; 1: as the recipe says |
| `masked` | a message | torchtune (`Message`) | true: no loss; false: as the recipe says |
| `labels` | tokens | transformers, axolotl | a token, or -100: no loss |
| `completion_mask`, `assistant_masks` | tokens | trl (`SFTTrainer`) | loss where all of them are 1 |
| `loss_mask` | tokens | Megatron-Bridge (`GPTSFTDataset`), torchtitan | loss where it is 1, at the token's own place |
| `attention_mask` | tokens | transformers, axolotl | 0 at either end: padding, which is cut off |
| `token_type_ids`, `position_ids`, `seq_lengths` | tokens | transformers, trl | only if they describe one document |

A value that means something else, such as a weight of 0.5, is refused.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.data.packing import NO_LABEL
from meshwright.spec.errors import UserError

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns of 0 and 1 beside `input_ids`."""
PLACES = ("token_type_ids", "position_ids", "seq_lengths")
"""Columns beside `input_ids` that say how several documents share a sequence."""
FLAGS = ("weight", "train", "training", "loss", "loss_scale", "loss_weight", "masked")
"""Fields of a message."""
DETAILS = ("training_detail", "train_detail", "reasoning_training_detail", "reasoning_train_detail")
"""Fields of a message that train parts of its text (axolotl)."""
_MARKS = frozenset((*FLAGS, *DETAILS))
_TEXT_FLAGS = {"": None, "0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
"""Flags as written in .csv files."""


def message_weight(message: Mapping[str, Any], role: str, where: str) -> int | None:
    """0: the message carries no loss; 1: it does, whatever the recipe trains; None: the recipe decides.

    Raises UserError for a flag that is neither 0 nor 1, and for flags that contradict each other.
    """
    if _MARKS.isdisjoint(message):
        return None
    for name in DETAILS:
        if message.get(name):
            raise UserError(
                f"{where}: {name!r} trains a part of a message, which is not supported; set train on whole messages, "
                "or remove it"
            )
    flags = {name: flag for name in FLAGS if (flag := _flag(message, name, where)) is not None}
    if len(set(flags.values())) > 1:
        raise UserError(f"{where}: {' and '.join(flags)} contradict each other; remove one")
    forced = flags.keys() & ({"train", "training", "loss"} if role == "assistant" else {"train", "training"})
    return None if 1 in flags.values() and not forced else next(iter(flags.values()), None)


def record_weight(fields: Mapping[str, Any], where: str) -> int | None:
    """0 if the record is left out. Raises UserError like `message_weight`."""
    flags = [_flag(fields, name, where, ignore(name)) for name in ("weight", "train")]
    return 0 if 0 in flags else None


def ignore(column: str) -> str:
    """The remedy for a column that should not be read."""
    return f"to ignore the column, set columns={{{column}: null}} in the source"


def labels_of(fields: Mapping[str, Any], where: str) -> tuple[list[int], list[int]]:
    """(tokens, labels) of a record with `input_ids`, without padding. Raises UserError for columns that do not fit."""
    ids, labels = fields["input_ids"], fields.get("labels")
    masks = {name: _mask(fields, name, where) for name in MASKS if fields.get(name) is not None}
    if not _is_integers(ids) or not _is_integers(ids if labels is None else labels):
        raise UserError(f"{where}: input_ids and labels must be lists of whole numbers")
    for name, column in {"labels": labels, **masks}.items():
        if column is not None and len(column) != len(ids):
            raise UserError(f"{where}: {name!r} has {len(column)} values for {len(ids)} tokens")
    masked = [token if all(bits) else NO_LABEL for token, *bits in zip(ids, *masks.values(), strict=True)]
    if labels is None:
        labels = masked
    elif masks and labels != masked:
        raise UserError(f"{where}: labels and {' and '.join(masks)} contradict each other; remove one")
    if any(label not in (token, NO_LABEL) for token, label in zip(ids, labels, strict=True)):
        raise UserError(f"{where}: every label must be its own token or -100 (labels are shifted during training)")
    _check_one_document(fields, len(ids), where)
    first, last = _attended(fields, labels, where)
    return ids[first:last], labels[first:last]


def _attended(fields: Mapping[str, Any], labels: list[int], where: str) -> tuple[int, int]:
    """The first token that is not padding, and the end of the last."""
    if fields.get("attention_mask") is None:
        return 0, len(labels)
    mask = _mask(fields, "attention_mask", where)
    first = next((place for place, bit in enumerate(mask) if bit), len(mask))
    last = first + sum(mask)
    if len(mask) != len(labels) or not all(mask[first:last]):
        raise UserError(f"{where}: 'attention_mask' must be 1 for every token, and may be 0 for padding at the ends")
    if fields.get("labels") is not None and set(labels[:first] + labels[last:]) - {NO_LABEL}:
        raise UserError(f"{where}: padding (attention_mask 0) has labels; set them to -100")
    return first, last


def _check_one_document(fields: Mapping[str, Any], length: int, where: str) -> None:
    """Raise UserError if the tokens are several documents packed together."""
    trivial = {"token_type_ids": [0] * length, "position_ids": [*range(length)], "seq_lengths": [length]}
    for name in PLACES:
        if fields.get(name) not in (None, [], trivial[name]):
            raise UserError(
                f"{where}: column {name!r} describes several documents or kinds of tokens in one record; give each "
                f"document its own record, or {ignore(name)}"
            )


def _mask(fields: Mapping[str, Any], name: str, where: str) -> list[int]:
    values = fields[name]
    if not isinstance(values, list) or any(value not in (0, 1) for value in values):
        raise UserError(f"{where}: {name!r} must be a list of 0 and 1")
    return [int(value) for value in values]


def _flag(fields: Mapping[str, Any], name: str, where: str, remedy: str = "remove or rename it") -> int | None:
    value = fields.get(name)
    value = _TEXT_FLAGS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if value is None:
        return None
    if value not in (0, 1):
        raise UserError(f"{where}: {name!r} is {value!r}, but must be 0 (no loss) or 1; {remedy}")
    return int(not value if name == "masked" else value)


def _is_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)
