"""How each kind of golden fixture, whose numbers the original programs computed, is held against ours."""
