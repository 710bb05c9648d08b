"""Options of a run; lengths are in iterations. Periods are one epoch of COCO, as in the paper."""

train = dict(
    output_dir="./output",
    overwrite_output_dir=False,  # whether a new run may start in an output_dir with checkpoints
    init_checkpoint="",  # a pretrained backbone, or a detector with --eval-only
    max_iter=90000,
    seed=-1,
    device="cuda",
    cudnn_benchmark=False,
    amp=dict(enabled=False, dtype="auto"),
    gradient_accumulation_steps=1,  # micro-batches per batch
    max_nonfinite_steps=0,  # steps with a non-finite loss or gradient that may be skipped
    clip_norm=1.0,  # norm of all gradients together, ViL A.2; 0 for no clipping
    ema=dict(enabled=False, decay=0.9998),
    checkpointer=dict(period=7330, max_to_keep=None),
    eval_period=7330,
    best_metric="",  # metric of model_best.pth, such as "bbox/AP"
    early_stopping_patience=0,  # evaluations without improvement before the run ends; 0 for never
    num_visualized_images=4,  # validation images drawn at each evaluation
    log_period=20,
    feature_redraw_period=1000,  # iterations between two samplings of Performer's random features
    random_shift_fraction=0.0,  # share of max_iter with random-shift training (ViL)
)
