/* CUDA's runtime on the host: device memory is host memory, copies are memcpy, kernels do nothing. */
#include "common.h"

typedef void *Stream;
enum { OUT_OF_MEMORY = 2, INSUFFICIENT_DRIVER = 35, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { ON_DEVICE = 3, MAX_DEVICES = 16, MAX_BLOCKS = 65536 };

static __thread int current;
static long used[MAX_DEVICES];
static long live; /* streams, events and pieces of page-locked memory */
static int in_use[MAX_DEVICES]; /* devices that have a context */
static struct { void *address; long size; int device; } blocks[MAX_BLOCKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void log_call(const char *format, ...) {
  char line[256];
  va_list arguments;
  const char *path = getenv("STUB_LOG");
  FILE *file = path && *path ? fopen(path, "a") : NULL;
  if (!file) return;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  fprintf(file, "%s @%d\n", line, current);
  fclose(file);
}

#define FAIL_IF(code) do { int error_ = (code); if (error_) return error_; } while (0)

int cudaDriverGetVersion(int *version) { *version = setting("STUB_DRIVER", 13000); return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }

int cudaGetDeviceCount(int *count) {
  *count = 0;
  FAIL_IF(error_of("cudaGetDeviceCount", 0));
  if (setting("STUB_DRIVER", 13000) < 13000) return INSUFFICIENT_DRIVER;
  *count = visible_devices();
  return *count ? 0 : NO_DEVICE;
}

static int check_device(int device) { return device >= 0 && device < visible_devices() ? 0 : INVALID_DEVICE; }

int cudaGetDevice(int *device) { *device = current; return 0; }

int cudaSetDevice(int device) {
  FAIL_IF(check_device(device));
  log_call("cudaSetDevice %d", device);
  FAIL_IF(error_of("cudaSetDevice", device));
  current = device;
  in_use[device] = 1;
  return 0;
}
int stubIsInUse(int device) { return in_use[device]; }
long stubUsed(int device) { return used[device]; }
long stubLive(void) { return live; }
void stubForgetContexts(void) { memset(in_use, 0, sizeof in_use); }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  FAIL_IF(check_device(device));
  switch (attribute) { /* those of an H100, as cudaDeviceAttr numbers them */
    case 1: *value = 1024; break;     /* threads per block */
    case 8: *value = 49152; break;    /* shared memory per block */
    case 10: *value = 32; break;      /* threads per warp */
    case 16: *value = 132; break;     /* multiprocessors */
    case 39: *value = 2048; break;    /* threads per multiprocessor */
    case 75: *value = 9; break;       /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break;  /* shared memory per multiprocessor */
    case 97: *value = 232448; break;  /* shared memory per block, on request */
    default: *value = 1;
  }
  return 0;
}

/* the beginning of CUDA 13's cudaDeviceProp */
struct Properties {
  char name[256], uuid[16], luid[8];
  unsigned node_mask;
  size_t total, shared;
  int registers, warp;
  size_t pitch;
  int threads, block[3], grid[3];
  size_t constant;
  int major, minor;
  size_t alignment, pitch_alignment;
  int multiprocessors;
};

int cudaGetDeviceProperties(struct Properties *p, int device) {
  FAIL_IF(check_device(device));
  FAIL_IF(error_of("cudaGetDeviceProperties", device));
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Stub H100 %d", device);
  memset(p->uuid, device, sizeof p->uuid);
  p->total = setting("STUB_MEMORY", 80L << 30);
  p->shared = 49152, p->registers = 65536, p->warp = 32, p->threads = 1024;
  p->block[0] = p->block[1] = 1024, p->block[2] = 64;
  p->grid[0] = 2147483647, p->grid[1] = p->grid[2] = 65535;
  p->major = 9, p->multiprocessors = 132;
  return 0;
}

int cudaMemGetInfo(size_t *free, size_t *total) {
  FAIL_IF(error_of("cudaMemGetInfo", current));
  *total = setting("STUB_MEMORY", 80L << 30), *free = *total - used[current];
  return 0;
}

int cudaMalloc(void **address, size_t size) {
  int slot = 0;
  FAIL_IF(error_of("cudaMalloc", current));
  pthread_mutex_lock(&lock);
  int full = used[current] + (long)size > setting("STUB_MEMORY", 80L << 30);
  if (!full) {
    while (slot < MAX_BLOCKS - 1 && blocks[slot].address) slot++;
    *address = aligned_alloc(256, (size + 255) / 256 * 256);
    blocks[slot].address = *address, blocks[slot].size = size, blocks[slot].device = current;
    used[current] += size;
  }
  pthread_mutex_unlock(&lock);
  log_call("cudaMalloc %zu %s", size, full ? "REFUSED" : "");
  return full ? OUT_OF_MEMORY : 0;
}

int cudaFree(void *address) {
  if (!address) return 0;
  pthread_mutex_lock(&lock);
  for (int slot = 0; slot < MAX_BLOCKS; slot++)
    if (blocks[slot].address == address) {
      used[blocks[slot].device] -= blocks[slot].size;
      blocks[slot].address = NULL;
      log_call("cudaFree %ld", blocks[slot].size);
      break;
    }
  pthread_mutex_unlock(&lock);
  free(address);
  return 0;
}

int cudaFreeAsync(void *address, Stream stream) { return cudaFree(address); }
int cudaHostAlloc(void **address, size_t size, unsigned flags) {
  FAIL_IF(error_of("cudaHostAlloc", current));
  *address = malloc(size), live++;
  return 0;
}
int cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
int cudaFreeHost(void *address) { free(address), live -= address != NULL; return 0; }
int cudaHostRegister(void *address, size_t size, unsigned flags) {
  FAIL_IF(error_of("cudaHostRegister", current));
  live++;
  return 0;
}
int cudaHostUnregister(void *address) { live--; return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { memcpy(to, from, size); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, Stream stream) {
  log_call("cudaMemcpyAsync %d %zu %p %ld", kind, size, stream, (long)from);
  if (kind == ON_DEVICE) FAIL_IF(error_of("copyOnDevice", current));
  return cudaMemcpy(to, from, size, kind);
}
int cudaMemset(void *address, int value, size_t size) { memset(address, value, size); return 0; }
int cudaMemsetAsync(void *address, int value, size_t size, Stream stream) { return cudaMemset(address, value, size); }

static int create(void **handle) { *handle = malloc(64), live++; return 0; }
static int destroy(void *handle) { free(handle), live--; return 0; }
static int log_wait(const char *function) { log_call("wait %s", function); return 0; }
int cudaStreamCreateWithFlags(Stream *stream, unsigned flags) { return create(stream); }
int cudaStreamCreate(Stream *stream) { return create(stream); }
int cudaStreamDestroy(Stream stream) { return destroy(stream); }
int cudaStreamSynchronize(Stream stream) { return log_wait("cudaStreamSynchronize"); }
int cudaDeviceSynchronize(void) { return log_wait("cudaDeviceSynchronize"); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return create(event); }
int cudaEventCreate(void **event) { return create(event); }
int cudaEventDestroy(void *event) { return destroy(event); }
int cudaEventSynchronize(void *event) { return log_wait("cudaEventSynchronize"); }
int cudaStreamIsCapturing(Stream stream, int *captures) { *captures = 0; return 0; }

int cudaLaunchKernel() { return 0; }
int __cudaLaunchKernel() { return cudaLaunchKernel(); }
int cudaLaunchKernelExC() { return cudaLaunchKernel(); }
int cudaLaunchHostFunc(Stream stream, void (*function)(void *), void *argument) { function(argument); return 0; }
int __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
static char fat_binary[64];
void **__cudaRegisterFatBinary(void *binary) { return (void **)fat_binary; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_) { *blocks_ = 8; return 0; }
int cudaFuncGetAttributes(void *attributes, const void *function) { memset(attributes, 0, 128); return 0; }
int cudaPointerGetAttributes(void *attributes, const void *address) {
  memset(attributes, 0, 32);
  *(int *)attributes = 2; /* device memory */
  return 0;
}
const char *cudaGetErrorName(int error) { return "cudaErrorOfAStub"; }
const char *cudaGetErrorString(int error) {
  switch (error) {
    case OUT_OF_MEMORY: return "out of memory";
    case INSUFFICIENT_DRIVER: return "CUDA driver version is insufficient for CUDA runtime version";
    case 46: return "CUDA-capable device(s) is/are busy or unavailable";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case 719: return "unspecified launch failure";
    default: return "error of a stub";
  }
}
