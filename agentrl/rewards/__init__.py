"""Shipped reward functions, which ``agent.reward`` names: forms of answers, texts, rankings, and published rewards."""
