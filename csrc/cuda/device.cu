// Queries of the current device and of its driver.
#include <cudaTypedefs.h>

#include "launch.cuh"

namespace fastsim {

namespace {

int attribute(cudaDeviceAttr name) {
  int device, value;
  check(cudaGetDevice(&device), "current device");
  check(cudaDeviceGetAttribute(&value, name, device), "device attribute");
  return value;
}

// cuTensorMapEncodeTiled of the installed driver. It is looked up at run time, because the library
// has to load where there is no driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result),
        "cuTensorMapEncodeTiled");
  if (result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(
        "fastsim: driver: wanted CUDA 12 or later for tensor maps, got an older one");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

DeviceGuard::DeviceGuard(int device) : device_(device) {
  check(cudaGetDevice(&previous_), "current device");
  if (device_ != previous_) check(cudaSetDevice(device_), "device of the tensors");
}
DeviceGuard::~DeviceGuard() {
  if (device_ != previous_) cudaSetDevice(previous_);
}

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

bool on_hopper() {
#if defined(FASTSIM_HOPPER)
  return attribute(cudaDevAttrComputeCapabilityMajor) == 9;
#else
  return false;
#endif
}

TensorMap tensor_map(const void* data, int64_t width, int64_t rows, int64_t row_bytes,
                     int box_rows) {
  static const auto encode = encoder();
  TensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[] = {hopper::kRowBytes / sizeof(__half), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), sizes, strides, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("fastsim: tensor map: wanted success, got driver error " +
                             std::to_string(result));
  }
  return map;
}

}  // namespace fastsim
