"""The public names of `ttapca.corruptions`, each imported when it is first used."""

from ttapca.corruptions.apply import check_images as check_images
from ttapca.corruptions.apply import corrupt as corrupt
from ttapca.corruptions.apply import corrupt_any_size as corrupt_any_size
from ttapca.corruptions.catalogue import CIFAR_C as CIFAR_C
from ttapca.corruptions.catalogue import CORRUPTIONS as CORRUPTIONS
from ttapca.corruptions.catalogue import EXTRA as EXTRA
from ttapca.corruptions.catalogue import IMAGENET_C as IMAGENET_C
from ttapca.corruptions.catalogue import SEVERITIES as SEVERITIES
from ttapca.corruptions.catalogue import STANDARD as STANDARD
from ttapca.corruptions.catalogue import Corruption as Corruption
from ttapca.corruptions.catalogue import SeverityTable as SeverityTable
from ttapca.corruptions.catalogue import default_table as default_table
from ttapca.corruptions.catalogue import find as find
from ttapca.corruptions.catalogue import load_table as load_table
from ttapca.corruptions.weather import TEXTURE_FILES as TEXTURE_FILES
from ttapca.corruptions.weather import load_textures as load_textures
