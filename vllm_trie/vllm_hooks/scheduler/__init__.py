"""Hooks in the scheduler: native beam search, cache salts.

Glossary of native beam search:

group
    One beam request, from its arrival to its hypotheses (:class:`group.BeamGroup`).
member
    One of the group's ``n`` requests that the front end waits for. It is never queued; at the end
    it receives one hypothesis.
row
    A sequence of a group that the engine runs: one running hypothesis of the search. A group has up
    to ``beam_width`` rows, which the front end never sees.
fork
    A row that shares its parent's KV blocks.
barrier
    The point where rows wait until every row of their group has an output, so that the search can
    take its step.
suspended
    A row without KV whose output is at the barrier: only its children are computed again.
claim
    Slots that fall free and wait for the next group (:class:`admission.Claim`).
parked
    A group whose rows all gave up their KV to other groups.
"""
