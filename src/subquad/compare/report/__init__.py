"""What a comparison tells: its result, the statistics of it, and the table and the page that show it."""
