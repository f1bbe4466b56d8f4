"""The rotary settings of a `config.json`, in both dialects: `rope_theta` with `rope_scaling`, and `rope_parameters`.

Knows what each key means and which dictionary counts where both stand in one file. Computes no frequency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_jax.checkpoints.notes import note
from echo_jax.models.config import RopeConfig

_OLD, _NEW = "rope_scaling", "rope_parameters"
_DEFAULT_THETA = 10000.0  # of transformers, where no dictionary that counts has one


def rope_from_hf(raw: Mapping[str, Any], default_reach: int) -> RopeConfig:
    """The rotary settings of a config.

    `rope_scaling` replaces `rope_parameters` whole, as in transformers, with a note where they differ. The theta is the
    one in the dictionary that counts, else the one beside it. Raises ValueError where two thetas contradict each other,
    where the only theta stands in the dictionary that does not count, and for a type that is not computed here.

    default_reach: what an absent max_position_embeddings means.
    """
    stated, theta = _resolved(raw)
    kind = _kind(stated)
    if kind not in ("default", "yarn") or any(isinstance(value, Mapping) for value in stated.values()):
        found = repr(kind) if kind not in ("default", "yarn") else "one per layer type"
        raise ValueError(
            f"rope type {found} is not supported; supported: 'default', 'yarn', one for all layers; a longer context "
            "needs a checkpoint trained with one of them"
        )
    if theta is None:
        raise ValueError(
            f"config.json lacks rope_theta (in {_NEW} or {_OLD}, or beside them); add what the model was trained with"
        )
    if stated.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor {stated['partial_rotary_factor']} is not supported; all qk_rope_head_dim dims are "
            "rotated, so it must be 1"
        )
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if stated.get("truncate") is False:
        raise ValueError("YaRN with truncate false is not supported; its ramp starts and ends at whole pairs")
    reach = raw.get("max_position_embeddings") or default_reach
    original = _original_reach(raw, stated) or reach
    factor = stated["factor"] if stated.get("factor") is not None else reach / original
    mscale, all_dim = stated.get("mscale"), stated.get("mscale_all_dim")
    plain = RopeConfig(kind="yarn", factor=float(factor), mscale=1.0, mscale_all_dim=0.0)
    # The ratio of the mscales counts only where both are given; else cosines and sines get the plain YaRN factor.
    derived = None if (mscale and all_dim) or not all_dim else plain.attention_factor()
    stated_factor = stated.get("attention_factor")
    return RopeConfig(
        theta=float(theta),
        kind="yarn",
        factor=float(factor),
        original_max_positions=int(original),
        beta_fast=float(stated.get("beta_fast") or 32),
        beta_slow=float(stated.get("beta_slow") or 1),
        mscale=float(mscale) if mscale and all_dim else 1.0,
        mscale_all_dim=float(all_dim or 0.0),
        cos_sin_factor=float(stated_factor) if stated_factor is not None else derived,
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The keys of YaRN, which are the same in both dialects; nothing for plain frequencies."""
    if rope.kind == "default":
        return {}
    raw = {
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    derivable = rope.mscale_all_dim != 0 and rope.mscale != 0 or rope.mscale == 1.0
    if rope.cos_sin_factor is not None or not derivable:
        raw["attention_factor"] = rope.attention_factor()
    return raw


def _resolved(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """The dictionary that counts, and the theta."""
    old, new = _dictionary(raw, _OLD), _dictionary(raw, _NEW)
    outer = raw.get("rope_theta")
    for key, stated in ((_OLD, old), (_NEW, new)):
        inner = stated.get("rope_theta")
        if outer is not None and inner is not None and inner != outer:
            raise ValueError(
                f"rope_theta is {outer} in config.json but {inner} in its {key}; keep the one that the model was "
                "trained with"
            )
    stated = old or new
    theta = stated.get("rope_theta", outer)
    if old and new:
        lost = new.get("rope_theta")
        if theta is None and lost is not None:
            raise ValueError(
                f"rope_theta is {lost} in {_NEW}, which {_OLD} replaces, and nowhere else, so that transformers takes "
                f"{_DEFAULT_THETA}; write the one that the model was trained with into {_OLD}"
            )
        if theta is not None:
            _note_differences(old | {"rope_theta": theta}, {"rope_theta": theta} | new)
    return stated, theta


def _dictionary(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The stated keys of a dictionary of config.json; those that are null are absent."""
    stated = raw.get(key) or {}
    if not isinstance(stated, Mapping):
        raise ValueError(f"{key} is {stated!r} but must be an object; correct config.json")
    return {name: value for name, value in stated.items() if value is not None}


def _kind(stated: Mapping[str, Any]) -> Any:
    """`rope_type`, else its older name `type`, else "default"."""
    kind, older = stated.get("rope_type"), stated.get("type")
    if kind is not None and older is not None and kind != older:
        note(f"rope_type {kind!r} and type {older!r} of one dictionary in config.json disagree; rope_type counts")
    return next((one for one in (kind, older) if one is not None), "default")


def _note_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    def plain(stated: Mapping[str, Any]) -> dict[str, Any]:
        kind = stated.get("rope_type", stated.get("type", "default"))
        return {**{key: value for key, value in stated.items() if key != "type"}, "rope_type": kind}

    counts, lost = plain(old), plain(new)
    keys = sorted(key for key in counts.keys() | lost.keys() if counts.get(key) != lost.get(key))
    if keys:
        differing = ", ".join(f"{key} {counts.get(key, 'absent')!r} for {lost.get(key, 'absent')!r}" for key in keys)
        note(f"config.json has {_OLD} and {_NEW}; {_OLD} replaces {_NEW} whole, as in transformers: {differing}")


def _original_reach(raw: Mapping[str, Any], stated: Mapping[str, Any]) -> Any:
    """Positions of the context before YaRN; some configs have them outside the dictionary."""
    key = "original_max_position_embeddings"
    inner, outer = stated.get(key), raw.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"{key} is {outer} in config.json but {inner} in its rotary settings; keep the one that the model was "
            "trained with"
        )
    return inner if outer is None else outer
