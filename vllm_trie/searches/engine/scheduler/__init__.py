"""Hooks in the scheduler: native beam search, cache salts.

Glossary of native beam search:

group
    One beam request, from its arrival to its hypotheses (:class:`group.BeamGroup`).
beam
    A running hypothesis of the search: a row of the group's arrays, and of the worker's batch. A
    group has up to ``beam_width`` of them.
proxy
    The request that stands for all beams of a group in vLLM's scheduler.
level
    One token of each beam, computed in one step.
pass
    A part of a step of the search, for as many beams as there is room for.
claim
    Slots that fall free and wait for the next group (:class:`admission.Claim`).
"""
