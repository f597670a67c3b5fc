"""Why two pictures match: shares of a score that add up to it, and heat maps over pictures."""

from cooc.explanation.shares import Explanation, Shares, draw, explain

__all__ = ["Explanation", "Shares", "draw", "explain"]
