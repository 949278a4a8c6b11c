"""The command line. Modules here import torch only inside commands, so that `subquad --help` answers at once."""
