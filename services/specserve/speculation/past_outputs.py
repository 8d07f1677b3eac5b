"""Past outputs, kept for suffix decoding: bounded, and never shown to another tenant.

Each tenant has two generations of outputs: the younger one grows, and when it holds half of what
may be kept, the older one is forgotten and it takes its place. Knows token ids only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from specserve.speculation.suffix_automaton import SuffixAutomaton

DrawKey = tuple[int, int]
"""(seed, choice): what an output's randomness was keyed by."""


PIECE = 256
"""Most tokens taken in at once: other requests wait meanwhile (1-2 ms)."""


@dataclass(slots=True)
class _Generation:
    outputs: SuffixAutomaton
    draw_keys: set[DrawKey] = field(default_factory=set)
    num_outputs: int = 0


@dataclass(slots=True)
class _Tenant:
    generations: list[_Generation] = field(default_factory=list)
    """The younger one first; one or two."""


class PastOutputs:
    """Outputs of finished requests, by tenant; the tenant that was idle longest goes first."""

    def __init__(self, max_num_outputs: int, max_num_tokens: int, max_depth: int) -> None:
        """Prepare an empty store.

        Args:
            max_num_outputs: most outputs kept, all tenants together; 0 keeps none.
            max_num_tokens: most tokens kept, all tenants together.
            max_depth: longest match and its guess together, in tokens.
        """
        self._max_num_outputs = max_num_outputs
        self._max_num_tokens = max_num_tokens
        self._max_depth = max_depth
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()

    @property
    def num_outputs(self) -> int:
        """Outputs kept."""
        return sum(generation.num_outputs for generation in self._generations())

    @property
    def num_tokens(self) -> int:
        """Tokens kept."""
        return sum(generation.outputs.num_tokens for generation in self._generations())

    def add(
        self, tenant_salt: bytes, draw_key: DrawKey, token_ids: Sequence[int]
    ) -> Generator[None, None, None]:
        """Keep the output of a finished request, or its end where it is long, piece by piece.

        Outputs are added one after another: an iterator is run to its end, or closed, before the
        next one begins.
        """
        if self._max_num_outputs == 0 or not token_ids:
            return
        tenant = self._tenants.setdefault(tenant_salt, _Tenant())
        self._tenants.move_to_end(tenant_salt)
        half_tokens = max(1, self._max_num_tokens // 2)
        kept = token_ids[-half_tokens:]
        young = tenant.generations[0] if tenant.generations else None
        if (
            young is None
            or young.num_outputs + 1 > max(1, self._max_num_outputs // 2)
            or young.outputs.num_tokens + len(kept) > half_tokens
        ):
            young = _Generation(SuffixAutomaton(self._max_depth))
            tenant.generations = [young, *tenant.generations[:1]]
        young.draw_keys.add(draw_key)
        young.num_outputs += 1
        try:
            for number, token_id in enumerate(kept, 1):
                young.outputs.append(token_id)
                if number % PIECE == 0:
                    yield
        finally:
            young.outputs.end_text()
            self._trim()

    def of(self, tenant_salt: bytes, but_not: DrawKey | None) -> list[SuffixAutomaton]:
        """Return what a tenant's request may look into now.

        Args:
            but_not: leave out what was drawn with this key. Under the `standard` rule a guess must
                not come from an output that the same uniforms have made: they would then decide
                about their own work, and the law would be another one.
        """
        tenant = self._tenants.get(tenant_salt)
        if tenant is None:
            return []
        self._tenants.move_to_end(tenant_salt)
        return [
            generation.outputs
            for generation in tenant.generations
            if but_not is None or but_not not in generation.draw_keys
        ]

    def _generations(self) -> list[_Generation]:
        return [one for tenant in self._tenants.values() for one in tenant.generations]

    def _trim(self) -> None:
        while self.num_outputs > self._max_num_outputs or self.num_tokens > self._max_num_tokens:
            salt, tenant = next(iter(self._tenants.items()))
            tenant.generations.pop()
            if not tenant.generations:
                del self._tenants[salt]
