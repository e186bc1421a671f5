module quotagate.example/clients/operations

go 1.23

require quotagate.example/clients/quotagate v0.0.0

replace quotagate.example/clients/quotagate => ../../../../clients/generated/go
