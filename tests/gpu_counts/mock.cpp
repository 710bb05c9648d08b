// A CUDA runtime that computes nothing: memory is the host's, kernels are counted and not run, values are zeros.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <atomic>
#include <cstring>

typedef void (*Callback)();
static std::atomic<long> launches{0}, handles{16};
static Callback on_wait = nullptr;

// The first half of the addresses is the device's memory, the second is pinned.
static const size_t HALF = 1ull << 41;
static char* const arena =
    (char*)mmap(nullptr, 2 * HALF, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
static std::atomic<size_t> used[2] = {{0}, {HALF}};

static bool on_device(const void* p) { return (size_t)((char*)p - arena) < HALF; }
static cudaError_t allocate(void** p, size_t bytes, int half) {
  *p = arena + used[half].fetch_add((bytes + 511) & ~511ull);
  return cudaSuccess;
}
static cudaError_t wait() {
  if (on_wait) on_wait();
  return cudaSuccess;
}
template <typename Handle>
static cudaError_t create(Handle* handle) {
  *handle = (Handle)(handles += 16);
  return cudaSuccess;
}
static int driver_function() { return 0; }

extern "C" {
void mock_on_wait(Callback callback) { on_wait = callback; }
long mock_launches() { return launches; }
int mock_launch() { return launches++, 0; }

cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Mock H100");
  p->totalGlobalMem = 80ull << 30;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = p->regsPerBlock = p->regsPerMultiprocessor = 65535;
  p->l2CacheSize = 50 << 20;
  p->textureAlignment = 512;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxGridDimX: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->binaryVersion = a->ptxVersion = 90;
  a->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  return *n = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = (void*)driver_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, 0); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, 1); }
cudaError_t cudaGetSymbolAddress(void** p, const void*) { return allocate(p, 4096, 0); }
cudaError_t cudaMemGetInfo(size_t* left, size_t* total) { return *left = *total = 80ull << 30, cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  bool is_pinned = !on_device(p) && on_device((char*)p - HALF);
  memset(a, 0, sizeof *a);
  a->type = on_device(p) ? cudaMemoryTypeDevice : is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = (void*)p;
  return cudaSuccess;
}
// What is on the device stays zero.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (!on_device(to)) memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return wait();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return create(s); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return create(e); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait(); }
cudaError_t cudaDeviceSynchronize() { return wait(); }

int cuCtxGetCurrent(void** context) { return create(context); }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, 0; }
cudaError_t __cudaGetKernel(void** kernel, const void* function) { return *kernel = (void*)function, cudaSuccess; }

int cublasCreate_v2(void** handle) { return create(handle); }
int cublasLtMatmulDescCreate(void** handle) { return create(handle); }
int cublasLtMatmulPreferenceCreate(void** handle) { return create(handle); }
int cublasLtMatrixLayoutCreate(void** handle) { return create(handle); }
int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* result, int* number) {
  memset(result, 0, 96);
  return *number = 1, 0;
}
}
