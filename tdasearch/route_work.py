"""The work of each operation on gradients by each route, counted from sizes alone. What the cost model chooses by.

Legend: N, M examples, T, S positions, I inputs, O outputs, G groups; o, i the ranks kept of O, I.
"""

from __future__ import annotations

import math

from tdasearch.cost_model import Route, Work, moved, product
from tdasearch.gradients import Size

_CACHE_LINE_BYTES = 64


def forming(size: Size, item_bytes: int) -> Work:
    """Count the forming of all examples' matrices.

    Args:
        size: Of the batch.
        item_bytes: Of one number.

    Returns:
        The work.
    """
    groups, positions = size.num_groups, size.num_examples * size.num_positions
    match size.form:
        case "dense":
            return Work()
        case "lookup":
            return moved(item_bytes * (size.num_elements + 4 * positions * size.out_dim), calls=2)
        case _ if groups == size.out_dim and size.in_dim == 1:  # norms: products of numbers, summed
            return moved(4 * item_bytes * positions * groups, calls=2)
        case _:
            return product(size.num_examples * groups, size.out_dim // groups, size.num_positions, size.in_dim)


def contributions(size: Size, item_bytes: int) -> Work:
    """Count the contributions of all positions to the inner product with one matrix."""
    num_examples, num_positions, groups = size.num_examples, size.num_positions, size.num_groups
    if size.form == "lookup":
        return moved(item_bytes * 5 * num_examples * num_positions * size.out_dim, calls=4)
    if groups == 1:
        back = product(1, num_examples * num_positions, size.out_dim, size.in_dim)
    else:
        back = product(num_examples * groups, num_positions, size.out_dim // groups, size.in_dim)
    return back + moved(item_bytes * 4 * num_examples * num_positions * groups * size.in_dim, calls=4)


def inner_products(left: Size, right: Size, item_bytes: int, chunk_bytes: int, route: Route) -> Work:
    """Count the inner products of two batches.

    Args:
        left: N examples.
        right: M examples.
        item_bytes: Of one number.
        chunk_bytes: Bound on what is formed at once.
        route: "factored" or "dense".

    Returns:
        The work.
    """
    if route == "dense" or left.form == right.form == "dense":
        both = forming(left, item_bytes) + forming(right, item_bytes)
        return both + product(1, left.num_examples, left.out_dim * left.in_dim, right.num_examples)
    num_rows, num_columns = left.num_examples * left.num_positions, right.num_examples * right.num_positions
    if left.form == right.form == "lookup":
        gram = product(1, num_rows, left.out_dim, num_columns)
        return gram + moved(num_rows * num_columns * (4 * item_bytes + 4), calls=5)
    groups = max(left.num_groups, right.num_groups)
    if gram_groups(left, right):
        grams = product(groups, num_rows, left.out_dim // groups, num_columns) + product(
            groups, num_rows, left.in_dim, num_columns
        )
        num_elements = groups * num_rows * num_columns
        chunks = math.ceil(3 * item_bytes * num_elements / chunk_bytes)
        return grams + moved(4 * item_bytes * num_elements, calls=12 * chunks)
    kept, matrices = (right, left) if left.form == "dense" else (left, right)
    return forming(matrices, item_bytes) + contributions(kept, item_bytes).times(matrices.num_examples)


def gram_groups(left: Size, right: Size) -> int:
    """Return how many groups two factored batches can be matched in (one that is not grouped: in any number); 0 if in none."""
    if not {left.form, right.form} <= {"outer", "grouped"}:
        return 0
    one, two = left.num_groups, right.num_groups
    return max(one, two) if one == two or min(one, two) == 1 else 0


def squared_norms(size: Size, item_bytes: int, route: Route) -> Work:
    """Count the squared norms.

    Args:
        size: N examples.
        item_bytes: Of one number.
        route: "factored" or "dense".

    Returns:
        The work.
    """
    if route == "dense" or size.form == "dense":
        return forming(size, item_bytes) + moved(3 * item_bytes * size.num_elements, calls=2)
    batch, num_positions = size.num_examples * size.num_groups, size.num_positions
    gram = product(batch, num_positions, size.out_dim // size.num_groups, num_positions)
    if size.form == "lookup":
        return gram + moved(batch * num_positions**2 * (4 * item_bytes + 4), calls=5)
    gram += product(batch, num_positions, size.in_dim, num_positions)
    return gram + moved(4 * item_bytes * batch * num_positions**2, calls=4)


def rotation(
    size: Size, out_rank: int | None, in_rank: int | None, activations_rotated: bool, item_bytes: int, route: Route
) -> Work:
    """Count a rotation and the forming of its result.

    Args:
        size: N examples.
        out_rank: o; None: the outputs are not rotated.
        in_rank: i; None: the inputs are not rotated.
        activations_rotated: Whether another module that reads the same tensor had it rotated already.
        item_bytes: Of one number.
        route: "factored": rotate the factors, then multiply; "dense": multiply, then rotate.

    Returns:
        The work.
    """
    num_examples, num_rows = size.num_examples, size.num_examples * size.num_positions
    o, i = out_rank or size.out_dim, in_rank or size.in_dim
    if route == "dense" or size.form != "outer":
        work = forming(size, item_bytes)
        if out_rank is not None:
            work += product(num_examples, o, size.out_dim, size.in_dim)
        return work if in_rank is None else work + product(1, num_examples * o, size.in_dim, i)
    work = product(num_examples, o, size.num_positions, i)
    if out_rank is not None:
        work += product(1, num_rows, size.out_dim, o)
    if in_rank is not None and not activations_rotated:
        work += product(1, num_rows, size.in_dim, i)
    return work


def mask(size: Size, num_coordinates: int, item_bytes: int, route: Route) -> Work:
    """Count the gathering of some coordinates.

    Args:
        size: N examples.
        num_coordinates: Of each example's matrix.
        item_bytes: Of one number.
        route: "factored" or "dense".

    Returns:
        The work.
    """
    if route == "dense" or size.form == "dense":
        return forming(size, item_bytes) + moved(2 * item_bytes * size.num_examples * num_coordinates)
    # Two numbers gathered, each a cache line of its own; brought to the type, multiplied and summed.
    num_products = size.num_examples * size.num_positions * num_coordinates
    return moved((2 * _CACHE_LINE_BYTES + 8 * item_bytes) * num_products, calls=4)
