"""Quantized storage of a frozen matrix: the rows of codes and scales that replace it in the table.

| kept as   | `codes`             | `scales`              | `groups`                   | bytes a parameter |
|-----------|---------------------|-----------------------|----------------------------|-------------------|
| int8      | [out, in] int8      | [out] int32           |                            | 1 + 4 / in        |
| nf4       | [out, in / 2] uint8 | [out, in / 64] int32  |                            | 0.5625            |
| double    | [out, in / 2] uint8 | [out, in / 64] uint8  | [out in / 16384 + 1] int32 | 0.5159            |

`models/blockwise.py` defines the numbers. Codes and scales have the matrix's rows and dim names, and no block spans two
rows, so they are split like the matrix. If `in` is not a multiple of 64, blocks span rows, as in bitsandbytes; codes
[blocks, 32] and scales [blocks] then have their own dims, which only data parallelism shards.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from meshwright.families.split import split_dim
from meshwright.spec.model import ModelSpec, Parameter

Storage = Literal["int8", "uint8", "int32"]

BLOCK, GROUP = 64, 256
"""Numbers of NF4 that share a scale; scales that share one under double quantization."""


def quantized_rows(weight: Parameter, kept_as: str, *, double: bool) -> Iterator[Parameter]:
    """The nf4 or int8 rows that replace a matrix [out, in], in the order of `named_parameters()`."""
    (out, into), (rows, columns) = weight.dims, weight.shape
    module = weight.name.rpartition(".")[0]

    def row(name: str, dims: tuple[str, ...], shape: tuple[int, ...], storage: Storage) -> Parameter:
        made = Parameter(
            name=f"{module}.{name}", dims=dims, shape=shape, init="quantized", trained=False, storage=storage
        )
        return replace(made, segments=weight.segments if dims[0] == out else ())

    if kept_as == "int8":
        yield row("codes", (out, into), (rows, columns), "int8")
        yield row("scales", (out,), (rows,), "int32")
        return
    blocks = -(-rows * columns // BLOCK)
    if columns % BLOCK:
        yield row("codes", ("blocks", "block"), (blocks, BLOCK // 2), "uint8")
        yield row("scales", ("blocks",), (blocks,), "uint8" if double else "int32")
    else:
        yield row("codes", (out, into), (rows, columns // 2), "uint8")
        yield row("scales", (out, into), (rows, columns // BLOCK), "uint8" if double else "int32")
    if double:
        yield row("groups", ("groups",), (-(-blocks // GROUP) + 1,), "int32")


def split_misfit(table: Iterable[Parameter], model: ModelSpec, tp: int) -> str | None:
    """Why `tp` ranks cannot split the quantized matrices of a table, and what would work; None if they can."""
    for row in table if tp > 1 else ():
        where = f"layout.tp={tp} with finetune.base=nf4: "
        if row.segments and row.storage != "float":
            module = row.name.rpartition(".")[0]
            return (
                f"layout.tp={tp} with a quantized base: the queries, keys and values in {module} are split one by one, "
                "which quantized matrices do not support; use finetune.method=lora, or layout.tp=1"
            )
        if row.dims == ("groups",):
            return f"{where}double quantization groups scales across rows; set double_quantization=false"
        if row.dims == ("blocks",):
            return f"{where}{row.name.rpartition('.')[0]} has blocks that span rows; use base=int8"
        if row.name.endswith(".scales") and split_dim(row, model, tp) == 1 and row.shape[1] % tp:
            blocks = f"{row.shape[1]} blocks of {BLOCK} in a row of {row.name.rpartition('.')[0]}"
            return f"{where}{blocks} cannot be split evenly over {tp} ranks; use base=int8"
    return None
