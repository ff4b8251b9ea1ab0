"""Constants of Python files: literals, and sums and products of them; no code is run."""

import ast
import operator
from collections.abc import Mapping
from typing import Any

ARITHMETIC = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv}
LARGEST = 2**63
"""Of a number, without its sign."""


def constant(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of an expression; its source, if it is no constant (such as 'run' + str(time.time())).

    `known` has the values of names. Raises what arithmetic raises.
    """
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = constant(node.left, known), constant(node.right, known)
        if isinstance(left, int | float) and isinstance(right, int | float):
            result = ARITHMETIC[type(node.op)](left, right)
            if not abs(result) < LARGEST:  # a few lines of squares fill any memory
                raise ArithmeticError("the number is too large")
            return result
        return ast.unparse(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return ast.unparse(node)
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        raise ArithmeticError("the number is too large")
    return value
