"""What every section of the configuration tree is: frozen, without unknown keys, without NaN and infinities."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One key of the tree with what stands below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
