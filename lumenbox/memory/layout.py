"""How the bytes of a KV page and of the weights lie in their segments. Plain data, agreed on by all processes."""

from __future__ import annotations

import msgspec


class LayerSlice(msgspec.Struct, frozen=True, array_like=True):
    """One layer of a page, at byte `offset`: [page_size, 2, kv_heads, head_dim], a token's K and V side by side."""

    offset: int
    kv_heads: int
    head_dim: int


class PageLayout(msgspec.Struct, frozen=True, array_like=True):
    """One KV page of `page_size` tokens over all layers, `page_bytes` long, contiguous (page-major pool)."""

    page_size: int
    page_bytes: int
    dtype: str
    layers: tuple[LayerSlice, ...]


class WeightEntry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter in the weight segment. Names that share storage (tied weights) share an offset."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str


class LoadReport(msgspec.Struct, frozen=True):
    """What the loader found out while filling the weight segment; every worker is built from it.

    `exact_probe` holds the settings that the probe proved (see engine/README.md); None where exactness is not proved,
    and then `inexact_reason` says why. `identity` is the hex digest that every KV page is tied to.
    """

    weights: tuple[WeightEntry, ...]
    weight_bytes: int
    page: PageLayout
    dtype: str
    threads: int
    numeric_class: str
    identity: str
    exact: bool
    inexact_reason: str
    min_rows: int
