"""From exact structure to a smaller model that computes the same."""

from espalier.compact.export import export as export
from espalier.compact.restore import load as load
from espalier.compact.shrink import Shrunk as Shrunk
from espalier.compact.shrink import shrink as shrink
from espalier.compact.store import save as save
from espalier.compact.verify import ShrinkError as ShrinkError
