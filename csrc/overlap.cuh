// Programmatic dependent launch: a kernel may start while the one before it still runs.
//
// A decode step of one sequence is some 300 kernels of a few microseconds. Launched one behind the other, each first waits
// until the last block of its predecessor is gone and its results are in memory, and only then sends off its first load:
// about a microsecond of idle memory per kernel. Weights do not depend on the predecessor, so a kernel that is resident
// early can have them under way when its input arrives. Needs sm_90; on older GPUs both functions do nothing.
//
// The rule that keeps this correct: every thread of a kernel that is launched this way (Kernel.__call__, overlap=True)
// calls `wait_for_previous` before it touches anything that a kernel still running may write, which means anything but
// weights, and before it ends. Then "my predecessor has finished" also means "so has everything before it". Pointers to
// what other kernels write are not `const __restrict__`: that would allow the compiler to load through them before the wait.
//
// Two kernels may read more before they wait, since their callers promise more. Positions and slots in norm_rope_store.cu:
// its predecessor is a linear layer, and they are older than that. Lengths, block tables and old tokens in decode attention
// (PagedAttention.decode): only queries and the newest token of each sequence come from kernels that may still run.
#pragma once

// Until the previous kernel on the stream has finished and what it wrote can be seen.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel's blocks in as soon as all of this kernel's blocks got here. They take the room that is left.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
