"""Programs that ill-treat subquad and see what it says, what it loses and what it computes afterwards."""
