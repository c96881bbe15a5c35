"""Judges: language models that score episodes, fill in rubrics, or rank the episodes of a group.

transcripts ─► question + form ─► client (cache, budget, service) ─► verdict ─► reward
"""
