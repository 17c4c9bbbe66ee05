"""The base of all Pydantic models."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A Pydantic model that refuses unknown keys and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
