# SPDX-License-Identifier: Apache-2.0
"""What the examples answer to options that they cannot use: examples_test.py TRAINING TRAINING_RUN"""
import subprocess
import sys
import unittest

TRAINING, TRAINING_RUN = sys.argv[1:3]
del sys.argv[1:]


class Examples(unittest.TestCase):
    def refuses(self, program, arguments, said):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
        self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
        self.assertIn(said, done.stderr)

    def test_training(self):
        self.refuses(TRAINING, ["--stepz", "3"], "training [--capacity]")
        for steps in "-5", "0", "3x":
            self.refuses(TRAINING, ["--steps", steps], f'--steps: "{steps}" is not a whole number from 1')
        for option in "--svg", "--json":
            self.refuses(TRAINING, ["--steps", "1", option, "/nosuch/file"], "cannot write /nosuch/file: No such file or directory")

    def test_training_run(self):
        self.refuses(TRAINING_RUN, ["--stepz", "3"], "training_run [--data even|skewed]")
        self.refuses(TRAINING_RUN, ["--top-k", "1000"], '--top-k: "1000" is not a whole number from 1 to 32')
        self.refuses(TRAINING_RUN, ["--seed", "-1"], '--seed: "-1" is not a whole number from 0')
        self.refuses(TRAINING_RUN, ["--zipf", "nan"], '--zipf: "nan" is not a number from 0 to 10')
        self.refuses(TRAINING_RUN, ["--on-rank", "5"], '--on-rank: "5" is not a number from 0 to 1')
        self.refuses(TRAINING_RUN, ["--on-rank", "0.8", "--on-node", "0.5"], "--on-rank 0.8 and --on-node 0.5 are more than all tokens")
        self.refuses(TRAINING_RUN, ["--svg", "/nosuch/file"], "cannot write /nosuch/file: No such file or directory")


if __name__ == "__main__":
    unittest.main()
