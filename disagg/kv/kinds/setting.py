"""What surrounds a group: numbers of the layout, of the model and of the worker."""

from dataclasses import dataclass

from disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """What a group gets from its surroundings.

    Attributes:
        group: index of the group in the layout.
        blocks_per_state: table entries per ``block_tokens`` tokens; only states have more than 1.
        hash_block_tokens: tokens per link of the hash chain.
        alignment_tokens: hits of the whole model are multiples of it.
        max_model_tokens: longest sequence.
        max_step_tokens: most tokens of one sequence between two moves of its window, the slots of
            drafts behind them included.
        drops_last: EAGLE: hits must be proven one block further.
        steps_max: steps of one sequence that are in flight at once.
        num_lookahead_tokens: slots of drafts behind the tokens of a step.
    """

    group: int
    blocks_per_state: int
    hash_block_tokens: int
    alignment_tokens: int
    max_model_tokens: int
    max_step_tokens: int
    drops_last: bool = False
    steps_max: int = 1
    num_lookahead_tokens: int = 0

    def num_blocks(self, num_tokens: int, block_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, or the longest sequence if that is shorter."""
        return -(-min(num_tokens, self.max_model_tokens) // block_tokens)

    def refuse_eagle(self, name: str) -> None:
        """For kinds whose hits cannot be proven further; raises ConfigError."""
        if self.drops_last:
            raise ConfigError(
                f"group {self.group}: {name} cannot be an EAGLE group", param="eagle_groups"
            )

    def refuse_lookahead(self, name: str) -> None:
        """For kinds that cannot go back behind a draft that was wrong; raises ConfigError."""
        if self.num_lookahead_tokens:
            raise ConfigError(
                f"group {self.group}: {name} has no slots for drafts", param="num_lookahead_tokens"
            )
