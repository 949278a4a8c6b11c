"""Makes a model that was trained with attention sub-quadratic, and measures what that costs: `subquad.linearise`."""
