"""Every registered mechanism keeps the contract; being registered is being tested."""

from subquad.mixers import available
from subquad.testing import contract

TestContract = contract(*available())
TestFloors = contract("identity")
