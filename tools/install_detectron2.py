"""Install detectron2 next to torch: the command `vil install-detectron2`, in a clone."""

from vil.install_detectron2 import main

if __name__ == "__main__":
    main()
