"""What happens inside a model on one text, as plain arrays: activations, attention, contributions, interventions."""

from plume.explain.explanation import Explanation, candidates, explain
from plume.explain.forward_pass import PARTS
from plume.explain.head_kinds import head_kinds
from plume.explain.interventions import Edit
from plume.explain.results import as_json, packed

__all__ = ["PARTS", "Edit", "Explanation", "as_json", "candidates", "explain", "head_kinds", "packed"]
