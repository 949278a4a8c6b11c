"""What developers run on a checkout: generation of docs and counts of the code. No part of the installed package."""
