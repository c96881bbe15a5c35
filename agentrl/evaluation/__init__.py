"""Evaluation: resumable measurement of one policy on fixed tasks, with confidence intervals."""
