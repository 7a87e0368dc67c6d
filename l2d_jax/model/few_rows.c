// Products y[rows, outputs] of few rows x[rows, inputs] with a matrix of a stack, in float32: XLA custom calls, CPUs.
//
// They read the matrix in place, once, in memory order, and prefetch. The sums of a row do not depend on other rows.

#include "xla/ffi/api/c_api.h"

#ifdef __AVX512F__
enum { LANES = 16, GROUP = 8 };  // GROUP: number of rows whose sums fit into registers
#else
enum { LANES = 8, GROUP = 4 };
#endif
enum { DEPTH = 8, PARTS = 2, OUTPUTS = 4, UNIT = 32 };
#define PIECE 65536  // values of a matrix for which a further thread pays off
#define ROWS 128  // largest number of rows, as in few_rows.py
#define TILE 128  // columns per tile for many rows; half of it for more than a quarter of ROWS
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
#define AT(address) (*(Vector *)(address))

typedef struct {
  float *x, *w, *y;
  long rows, inputs, outputs, width, next, left, is_transposed;  // width: outputs of a piece; next, left: pieces
  const XLA_FFI_Api *api;
  XLA_FFI_Future *future;
} Job;

// sums += x[:, k] w[k] for DEPTH values of k, from zero at k = 0, in the columns of a piece; rows are `stride` apart.
INLINE void add(const Job *job, long first, long k, long low, long high, float *into, long stride, int rows) {
  const long inputs = job->inputs, outputs = job->outputs;
  float *x = job->x + first * inputs + k;
  for (long n = low; n < high; n += PARTS * LANES) {
    float *y = into + first * stride + n - low;
    Vector sums[GROUP][PARTS] = {0};
    for (int row = 0; row < rows && k; row++)
      for (int part = 0; part < PARTS; part++) sums[row][part] = AT(y + row * stride + part * LANES);
    for (int j = 0; j < DEPTH; j++)
      for (int part = 0; part < PARTS; part++) {
        float *line = job->w + (k + j) * outputs + n + part * LANES;
        if (first == 0) __builtin_prefetch(line + DEPTH * outputs, 0, 2);
        for (int row = 0; row < rows; row++) sums[row][part] += x[row * inputs + j] * AT(line);
      }
    for (int row = 0; row < rows; row++)
      for (int part = 0; part < PARTS; part++) AT(y + row * stride + part * LANES) = sums[row][part];
  }
}

// Call a function for at most `count` rows, with their number as a compile-time constant.
#define WITH(rows, function, ...) \
  case rows: function(__VA_ARGS__, rows); break;
#define FOR_ROWS(count, function, ...) \
  for (long first = 0; first < job->rows; first += count) \
    switch (job->rows - first < count ? job->rows - first : count) { \
      WITH(1, function, job, first, __VA_ARGS__) WITH(2, function, job, first, __VA_ARGS__) \
      WITH(3, function, job, first, __VA_ARGS__) WITH(4, function, job, first, __VA_ARGS__) \
      WITH(5, function, job, first, __VA_ARGS__) WITH(6, function, job, first, __VA_ARGS__) \
      WITH(7, function, job, first, __VA_ARGS__) WITH(8, function, job, first, __VA_ARGS__) \
    }

// The columns of a piece for many rows, tile by tile, so that the sums stay in the first-level cache.
static void tiles(const Job *job, long low, long high) {
  float sums[ROWS * TILE / 2] __attribute__((aligned(64)));
  const long tile = job->rows > ROWS / 4 ? TILE / 2 : TILE;
  for (long left = low; left < high; left += tile) {
    const long right = left + tile < high ? left + tile : high;
    for (long k = 0; k < job->inputs; k += DEPTH) FOR_ROWS(GROUP, add, k, left, right, sums, tile)
    for (long row = 0; row < job->rows; row++)
      for (long n = left; n < right; n += LANES) AT(job->y + row * job->outputs + n) = AT(sums + row * tile + n - left);
  }
}

// The sum of a vector, in halves.
INLINE float total(Vector vector) {
  float sums[LANES] __attribute__((aligned(64)));
  AT(sums) = vector;
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
  return sums[0];
}

// y[:, n] = x . w[n] for OUTPUTS values of n.
INLINE void dot(const Job *job, long first, long n, int rows) {
  const long inputs = job->inputs;
  float *x = job->x + first * inputs;
  Vector sums[GROUP][OUTPUTS] = {0};
  for (long k = 0; k < inputs; k += LANES)
    for (int j = 0; j < OUTPUTS; j++) {
      float *line = job->w + (n + j) * inputs + k;
      if (first == 0) __builtin_prefetch(line + OUTPUTS * inputs, 0, 2);
      for (int row = 0; row < rows; row++) sums[row][j] += AT(x + row * inputs + k) * AT(line);
    }
  for (int row = 0; row < rows; row++)
    for (int j = 0; j < OUTPUTS; j++) job->y[(first + row) * job->outputs + n + j] = total(sums[row][j]);
}

static void piece(void *data) {
  Job *job = data;
  const XLA_FFI_Api *api = job->api;
  XLA_FFI_Future_SetAvailable_Args done = {sizeof done, 0, job->future};
  const long low = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED) * job->width, end = low + job->width;
  const long high = end < job->outputs ? end : job->outputs;
  if (job->is_transposed)
    for (long n = low; n < high; n += OUTPUTS) FOR_ROWS(GROUP / 2, dot, n)
  else if (job->rows > GROUP)
    tiles(job, low, high);
  else
    for (long k = 0; k < job->inputs; k += DEPTH) FOR_ROWS(GROUP, add, k, low, high, job->y + low, job->outputs)
  if (__atomic_sub_fetch(&job->left, 1, __ATOMIC_ACQ_REL) == 0) api->XLA_FFI_Future_SetAvailable(&done);
}

// The custom call: from x [..., inputs], a stack of matrices and a layer number to y; a scratch result holds the job.
static XLA_FFI_Error *start(XLA_FFI_CallFrame *frame, long is_transposed) {
  if (frame->extension_start) {  // XLA asks for the version
    XLA_FFI_Api_Version *version = &((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata->api_version;
    version->major_version = XLA_FFI_API_MAJOR;
    version->minor_version = XLA_FFI_API_MINOR;
    return 0;
  }
  XLA_FFI_Buffer **in = (XLA_FFI_Buffer **)frame->args.args, **out = (XLA_FFI_Buffer **)frame->rets.rets;
  XLA_FFI_Future_Create_Args created = {sizeof created};
  Job *job = out[1]->data;
  long rows = 1, inputs = in[0]->dims[in[0]->rank - 1], outputs = out[0]->dims[out[0]->rank - 1];
  for (int axis = 0; axis < in[0]->rank - 1; axis++) rows *= in[0]->dims[axis];
  int64_t layer = *(int *)in[2]->data, threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args pool = {sizeof pool, 0, frame->ctx, &threads};
  frame->api->XLA_FFI_ThreadPool_NumThreads(&pool);
  long width = (outputs + threads - 1) / threads > PIECE / inputs ? (outputs + threads - 1) / threads : PIECE / inputs;
  width = (width + UNIT - 1) / UNIT * UNIT;
  frame->api->XLA_FFI_Future_Create(&created);
  frame->future = created.future;
  *job = (Job){in[0]->data, (float *)in[1]->data + layer * inputs * outputs, out[0]->data, rows, inputs, outputs, width,
               0, (outputs + width - 1) / width, is_transposed, frame->api, created.future};
  for (long others = job->left - 1; others > 0; others--) {
    XLA_FFI_ThreadPool_Schedule_Args other = {sizeof other, 0, frame->ctx, piece, job};
    frame->api->XLA_FFI_ThreadPool_Schedule(&other);
  }
  piece(job);
  return 0;
}

XLA_FFI_Error *product(XLA_FFI_CallFrame *frame) { return start(frame, 0); }
XLA_FFI_Error *transposed_product(XLA_FFI_CallFrame *frame) { return start(frame, 1); }
