"""Options of a run; lengths are in iterations, of an epoch of COCO where the paper gives one."""

train = dict(
    output_dir="./output",
    overwrite_output_dir=False,  # whether a new run may start in an output_dir with checkpoints
    init_checkpoint="",  # a pretrained backbone, or a detector with --eval-only
    max_iter=90000,
    seed=-1,
    device="cuda",
    cudnn_benchmark=False,
    amp=dict(enabled=False, dtype="auto"),
    gradient_accumulation_steps=1,  # micro-batches of a batch
    max_nonfinite_steps=0,  # batches that may be skipped because their loss or gradient is not finite
    clip_norm=1.0,  # of all gradients together, ViL A.2; 0 for none
    ema=dict(enabled=False, decay=0.9998),
    checkpointer=dict(period=7330, max_to_keep=None),
    eval_period=7330,
    best_metric="",  # whose best checkpoint is kept as model_best.pth, as "bbox/AP"
    early_stopping_patience=0,  # evaluations without a better best_metric after which the run ends; 0 for never
    num_visualized_images=4,  # validation images drawn at each evaluation
    log_period=20,
    feature_redraw_period=1000,  # of Performer's random features
    random_shift_fraction=0.0,  # the share of max_iter in which ViL's local attention sees one neighbouring chunk
)
