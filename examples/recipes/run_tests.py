"""python3 -I run.py MODULE …: exit code 7 if all tests of these modules pass.

Without the environment and the script's folder on the path, so that nothing in the repository can
replace the test runner; and not 0, which a repository that ends the process would give, too.
"""

import sys
import unittest

sys.path += ["/tests", "/app"]
suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(7 if result.testsRun and result.wasSuccessful() else 1)
