"""``python -m nanoengine`` is the same as ``nanoengine``."""

import sys

from nanoengine.cli import main

sys.exit(main())
