"""Names for missing things, and the size of a page: a second time, so that a slip in the library shows."""

NO_SLOT = -1
NO_ROW = -1
NO_PAGE = -1
NO_POSITION = -1
FREE_PRIORITY = -2147483648
PAGE = 64
