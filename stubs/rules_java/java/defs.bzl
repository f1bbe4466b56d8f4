# Forwards each rule to Bazel's own, so that nothing is downloaded.

def java_library(**arguments):
    native.java_library(**arguments)

def java_binary(**arguments):
    native.java_binary(**arguments)

def java_import(**arguments):
    native.java_import(**arguments)

def java_test(**arguments):
    native.java_test(**arguments)

def java_runtime(**arguments):
    native.java_runtime(**arguments)

def java_toolchain(**arguments):
    native.java_toolchain(**arguments)
