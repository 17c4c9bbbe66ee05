"""Base classes of all Pydantic models, and a validator of lists."""

from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Strict(BaseModel):
    """A Pydantic model that refuses unknown keys and does not convert types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Extended(Strict):
    """A model that omits new fields with default values from plain data, so step keys stay."""

    new_fields: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_new(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        defaults = {name: type(self).model_fields[name].default for name in self.new_fields}
        return {k: v for k, v in data.items() if k not in defaults or v != defaults[k]}


Item = TypeVar("Item")


def once(values: list[Item]) -> list[Item]:
    """Refuse a value that is given twice."""
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given twice")
    return values
