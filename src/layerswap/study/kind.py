"""The base of the kinds of step of a study."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from layerswap.ground.errors import StudyError
from layerswap.ground.strict import Strict
from layerswap.ground.types import Log
from layerswap.study.runner import Context
from layerswap.study.spec import StepKind
from layerswap.study.steps import Graph, Resources, Step


class Kind(Strict):
    """The settings of one kind of step, which checks and runs the step.

    A planned step (`Step`) holds the settings that were given as plain data: they are in its key
    and in `study.json`, and workers of a cluster read them from there. `of` restores them.
    """

    kind: ClassVar[str]
    resources: ClassVar[StepKind | None] = None  # key of the study; None if fixed
    version: ClassVar[int] = 1  # raised when a step writes something else for the same settings

    @classmethod
    def of(cls, step: Step) -> Self:
        """The settings of a step: as planned, or restored from plain data.

        Raises:
            StudyError: they are not of this kind, such as in a damaged `study.json`.
        """
        if isinstance(step.planned, cls):
            return step.planned
        try:
            return cls.model_validate_json(json.dumps(dict(step.settings)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise StudyError(f"{step.name}: {where}: {first['msg']}") from None

    @classmethod
    def all_of(cls, graph: Graph) -> dict[str, Self]:
        """Restore the settings of every step of this kind, by name."""
        return {step.name: cls.of(step) for step in graph if step.kind == cls.kind}

    def settings(self) -> dict[str, Any]:
        """The settings that were given, as plain data."""
        return self.model_dump(mode="json", include=self.model_fields_set)

    def plan(
        self,
        name: str,
        needs: Sequence[str] = (),
        inputs: Mapping[str, str] | None = None,
        *,
        resources: Resources | None = None,
        delete_checkpoints: bool = False,
    ) -> Step:
        """Make the step of these settings."""
        return Step(
            name, self.kind, self.settings(), tuple(needs), inputs or {}, resources or Resources(),
            self.version, delete_checkpoints, self,
        )  # fmt: skip

    def check(self, name: str) -> None:
        """Check the settings of the step `name` without fetching anything."""

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Check the files, columns, splits and labels that the step will read.

        Without `fetch`, only those on this machine. `log` receives a line for each benchmark that
        is left out. `seen` holds the suites and languages that other steps checked.
        """

    def check_here(self, name: str, *, device: bool) -> None:
        """Check the device and the Hub; `device` is true if this machine runs the step."""

    @abstractmethod
    def run(self, context: Context) -> None:
        """Run the step: read the folders of the steps that it needs, and write into its own."""


def given(model: Strict) -> dict[str, Any]:
    """The settings of a part of a step as plain data, without those that are not given."""
    return {key: value for key, value in model.model_dump(mode="json").items() if value is not None}
