# Forwards each rule to Bazel's own, so that nothing is downloaded.

def cc_library(**arguments):
    native.cc_library(**arguments)

def cc_binary(**arguments):
    native.cc_binary(**arguments)

def cc_test(**arguments):
    native.cc_test(**arguments)

def cc_import(**arguments):
    native.cc_import(**arguments)

def cc_toolchain(**arguments):
    native.cc_toolchain(**arguments)

def cc_toolchain_suite(**arguments):
    native.cc_toolchain_suite(**arguments)

def objc_library(**arguments):
    native.objc_library(**arguments)

def cc_proto_library(**arguments):
    native.cc_proto_library(**arguments)
