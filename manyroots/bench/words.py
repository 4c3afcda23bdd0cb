"""Words that prompts are made of, and names of the projections that adapters change.

Here and not where they are used first, so that `bench serve` runs where there is no torch.
"""

from __future__ import annotations

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RECURRENT = (
    "in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a",
    "out_proj",
)  # fmt: skip
PROJECTIONS = (*ATTENTION, *RECURRENT, "gate_proj", "up_proj", "down_proj")

TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or
had an they which one you were all her she there would their we him been has when who will no
more if out so up said what its about than into them can only other time new some could these
two may first then do any like my now over such our man me even most made after also river
stone garden winter letter engine market window silver bridge forest music number
"""
