"""BlockManager: which blocks of the KV cache belong to which sequence.

It owns the free list and every sequence's block table. A block is either free or in exactly one
table; block 0 is the dummy that padding rows point at, and is never handed out.
"""

from collections import deque
from collections.abc import Iterable

from tinyvllm_jax.engine.sequence import Sequence


class BlockManager:
    """Hands out blocks of `block_size` tokens from a pool of `num_blocks` (the dummy included)."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks: deque[int] = deque(range(1, num_blocks))

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can have."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Whether all of a waiting sequence's tokens fit, with `reserve` blocks left over."""
        return self.blocks_for(seq.num_tokens) + reserve <= len(self.free_blocks)

    def allocate(self, seq: Sequence) -> None:
        """Gives a waiting sequence the blocks for all its tokens."""
        assert not seq.block_table
        seq.block_table = [
            self.free_blocks.popleft() for _ in range(self.blocks_for(seq.num_tokens))
        ]

    def can_append(self, seq: Sequence) -> bool:
        """Whether a running sequence's newest token fits."""
        return self.blocks_for(seq.num_tokens) <= len(seq.block_table) + len(self.free_blocks)

    def append(self, seq: Sequence) -> None:
        """Gives a running sequence the block that its newest token needs, if it starts one."""
        if self.blocks_for(seq.num_tokens) > len(seq.block_table):
            seq.block_table.append(self.free_blocks.popleft())

    def free(self, seq: Sequence) -> None:
        """Takes a sequence's blocks back.

        A step in flight may still write to them. That is harmless: the device runs steps in order,
        so whoever gets the blocks next writes after it and reads only what it wrote.
        """
        self.free_blocks.extend(reversed(seq.block_table))
        seq.block_table = []

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every block is free or owned by exactly one of
        `sequences`.
        """
        owned = [block for seq in sequences for block in seq.block_table]
        blocks = sorted([*owned, *self.free_blocks])
        assert blocks == list(range(1, self.num_blocks)), f"blocks lost or shared: {blocks}"
