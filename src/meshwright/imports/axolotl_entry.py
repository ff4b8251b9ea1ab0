"""A data set of axolotl: its keys, and the source that it becomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.imports.claims import Always, NoEffect
from meshwright.imports.reading import Reading, Rule
from meshwright.imports.rules import only, unsupported, without
from meshwright.spec.errors import UserError

READ_ALL = "all records are read; write the ones to train on to a file of their own"
PREPARE = "prepare the records before, and set data.sources"


@dataclass
class Entry:
    """A data set of axolotl: its keys with their origins, and the source that it becomes."""

    reading: Reading
    place: str
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    """Origins of the keys that the source says."""

    def pop(self, key: str, default: Any = None) -> tuple[Any, str]:
        """A key's value and origin, taken out."""
        return self.keys.pop(key, (default, self.place))

    def say(self, origin: str, **settings: Any) -> None:
        """Set the source's settings."""
        self.source |= settings
        self.used.append(origin)

    def column(self, ours: str, key: str, default: str) -> None:
        """Rename a column, if a key gives it another name than ours; `default` is axolotl's name."""
        theirs, origin = self.pop(key, default)
        if theirs != ours:
            self.say(origin, columns={**self.source.get("columns", {}), ours: theirs})
        else:
            self.reading.claim(origin, Always(f"the column {ours} is read"))


def keep(keys: dict[str, tuple[Any, str]], key: str) -> Rule:
    """Keeps a value, which must be of its key's kind."""
    kinds = KINDS.get(key, (str,))

    def rule(reading: Reading, value: Any, origin: str) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise UserError(f"{origin}: must be {' or '.join(WORDS[kind] for kind in kinds)}")
        keys[key] = value, origin

    return rule


WORDS: Mapping[type, str] = {
    str: "text",
    dict: "a mapping",
    list: "a list",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
KINDS: Mapping[str, tuple[type, ...]] = {
    "type": (str, dict),
    "data_files": (str, list),
    "name": (str, list),
    **dict.fromkeys(("shards", "shards_idx", "preprocess_shards", "skip", "max_completion_length"), (int,)),
    **dict.fromkeys(("trust_remote_code", "drop_system_message", "split_thinking", "train_on_last_step_only"), (bool,)),
    "temperature": (int, float),
    "message_property_mappings": (dict,),
    "roles": (dict,),
    "roles_to_train": (list,),
}
"""Key of a data set -> the types of its value; other keys take text."""
LEFT: Mapping[str, Rule] = {
    "trust_remote_code": NoEffect.CODE,
    "revision": without("the newest version of the data set is read"),
    "shards": only(1, READ_ALL),
    "shards_idx": without(READ_ALL),
    "preprocess_shards": NoEffect.READS,
    "skip": unsupported(READ_ALL),
    "train_on_eot": without("data.chat.train_on_eos is about the tokens that end a turn"),
    "drop_system_message": unsupported(PREPARE),
    "split_thinking": unsupported(PREPARE),
    "message_field_training_detail": without(PREPARE),
    "conversation": without("set data.chat.template"),
    "chat_template_jinja": without("write the template to a file and set data.chat.template to it"),
}
"""Keys that no source says, and why."""
