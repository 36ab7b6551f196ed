"""Errors for users: each says what is wrong with its arithmetic, where it is, and the way out."""


class PlanError(ValueError):
    """The request cannot be planned, emitted or launched as asked."""


class TraceError(PlanError):
    """The model cannot be traced as it is written."""


class TypeCheckError(PlanError):
    """A program's placements contradict the sharding rules: a collective is missing or wrong.

    `short`: the problem and the user's line, for a table.
    """

    short = ""


class InfeasibleError(PlanError):
    """No plan fits the memory budget or the pins; names the binding constraint."""
