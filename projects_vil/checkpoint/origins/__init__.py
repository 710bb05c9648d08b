"""Where weights come from: official checkpoints, classifiers of this project and of timm."""
