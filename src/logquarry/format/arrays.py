"""The types of NumPy arrays that all layers use. A name says what the array's elements are."""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]
