"""What a run measures while it trains, and how it becomes records.

One step's numbers take this way::

    loop, dispatcher, exchanger         marks, losses and bucket traces of a running step
      recorder.py, clock.py               StepRecorder.begin_step, lap, end_step -> StepMarks
    every half second
      step_timing.py                      resolve_step_marks: StepMarks -> ResolvedSteps
      control_message.py                  MessageAccumulator -> messages, posted to all ranks
    a step later
      control_message.py                  all_ready_us: the messages of all ranks -> ready times
      recorder.py, stragglers.py          what all ranks know; who is late -> loop, progress.py
    while the training thread waits anyway
      step_timing.py                      split_exposed_time: exposed_hook_us, exposed_wait_us,
                                          exposed_wire_us; step and bucket records
      writer.py                           to disk; from other hosts to rank 0
"""
