"""Writes the generated prompt: a table of made-up names and numbers, then questions about some of them.

python echo_jax/data/traces/prompts/make_task.py > echo_jax/data/traces/prompts/task.txt
"""

import random

random.seed(7)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
names = sorted({"".join(random.choices(SYLLABLES, k=3)) for _ in range(340)})
random.shuffle(names)
table = {name: random.randrange(10_000, 100_000) for name in names[:330]}

print("The number of each name:\n")
for name, number in table.items():
    print(f"{name.capitalize()} has the number {number}.")
print("\nSome of them again:\n")
asked = random.sample(list(table), 12)
for name in asked[:-1]:
    print(f"{name.capitalize()} has the number {table[name]}.")
print(f"{asked[-1].capitalize()} has the number ", end="")
