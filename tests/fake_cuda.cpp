// A CUDA device for fake tensors in a torch that was built without CUDA: loaded before libtorch_cpu, it lets autograd
// run on tensors that have a device and a shape but no data.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
};
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

struct Hooks : at::CUDAHooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

// These two replace libtorch_cpu's, which would find no accelerator.
namespace at::accelerator {
std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}
namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
}
