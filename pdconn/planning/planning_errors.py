"""Why no plan can be made."""

from __future__ import annotations

from pdconn.protocol.compat import Difference

_SHOWN = 8


class PlanningError(Exception):
    """Base of planning errors."""


class Incompatible(PlanningError):
    """Two engines that cannot exchange KV, with every difference that prevents it.

    ``content`` is how their attention backends arrange a block, where that is known: a packed
    block (NVFP4, say) divides among ranks only as far as its backend allows.
    """

    def __init__(self, *differences: Difference, content: str = "") -> None:
        self.differences = differences
        shown = [str(difference) for difference in differences[:_SHOWN]]
        if len(differences) > _SHOWN:
            shown.append(f"and {len(differences) - _SHOWN} more")
        of_what = f" (block_content {content})" if content else ""
        super().__init__("; ".join(shown) + of_what)

    @classmethod
    def in_field(cls, field: str, theirs: object, ours: object) -> Incompatible:
        """One difference."""
        return cls(Difference(field, str(theirs), str(ours)))


class MissingBlock(PlanningError):
    """The lender does not hold a block that we need."""


class BlockOutOfRange(PlanningError):
    """A block id beyond the end of its cache."""


class TooManyRuns(PlanningError):
    """A pull in more runs than the limit: ``pdconn plan`` finds better pairs of engines."""
